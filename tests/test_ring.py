"""The ring hands on what was put into it, bit for bit, or says that it did not; and the training does not notice."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from replaylens._watch.child import wire
from replaylens._watch.ring import Ring, is_dense, places, step_through

MIB = 1 << 20
NAN, INF = math.nan, math.inf


@pytest.fixture
def ring():
    made = Ring(slots=8)
    yield made
    made.close()


def through(ring, tensor, **facts):
    """The sample that a tensor becomes."""
    assert ring.put(tensor, "layer", "activation", 3, **facts), ring.why_refused
    return ring.latest("layer", "activation")


def everything(reader):
    return list(iter(reader.take, None))


# -- what arrives -------------------------------------------------------------------------------------------------------

FLOATS = torch.float32, torch.float64, torch.float16, torch.bfloat16
SMALL_FLOATS = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
INTEGERS = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64


@pytest.mark.parametrize("dtype", [*FLOATS, *SMALL_FLOATS, *INTEGERS, torch.bool], ids=str)
def test_values_of_every_type_arrive_as_they_are(ring, dtype):
    tensor = torch.tensor([[0, 1, 3], [5, 7, 100]]).to(dtype)
    sample = through(ring, tensor)
    assert torch.equal(torch.from_numpy(sample.values.copy()).double(), tensor.double())
    assert sample.values.shape == sample.shape == (2, 3)
    assert sample.dtype == str(dtype).removeprefix("torch.") and sample.size == 6 and not sample.thinned


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_finite_arrives_too(ring, dtype):
    values = through(ring, torch.tensor([NAN, INF, -INF, -0.0], dtype=dtype)).values
    assert np.isnan(values[0]) and values[1] == INF and values[2] == -INF and np.signbit(values[3])


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_values_stay_complex(ring, dtype):
    tensor = torch.tensor([1 + 2j, -3j]).to(dtype).conj()
    assert through(ring, tensor).values.tolist() == [1 - 2j, 3j]


WHOLE = torch.arange(24.0).reshape(2, 3, 4)
LAYOUTS = {
    "transposed": WHOLE.transpose(0, 2),
    "sliced": WHOLE[:, ::2, 1:3],
    "expanded": WHOLE[:1].expand(5, 3, 4),
    "channels_last": torch.arange(48.0).reshape(2, 3, 4, 2).contiguous(memory_format=torch.channels_last),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "nine dimensions": torch.arange(4.0).reshape(1, 2, 1, 1, 1, 1, 1, 2, 1),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "in a graph": torch.ones(3, requires_grad=True) * 2,
    "sparse": torch.eye(3).to_sparse(),
    "mkldnn": torch.ones(2, 3).to_mkldnn(),
    "conjugate, imaginary part": torch.tensor([1 + 2j]).conj().imag,
    "zero without memory": torch._efficientzerotensor(3),
}


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS)
def test_values_of_every_layout_arrive_in_their_order(ring, tensor):
    sample = through(ring, tensor)
    wanted = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    assert np.array_equal(sample.values, wanted.resolve_neg().clone().numpy()) and sample.shape == tuple(tensor.shape)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantized_values_arrive_as_the_numbers_that_they_stand_for(ring):
    tensor = torch.quantize_per_tensor(torch.tensor([0.1, 0.32]), 0.1, 0, torch.qint8)
    assert (
        through(ring, tensor).values == pytest.approx([0.1, 0.3])
        and ring.latest("layer", "activation").dtype == "qint8"
    )


def test_of_a_large_sparse_tensor_the_stored_values_arrive(ring):
    tensor = torch.sparse_coo_tensor([[0, 5, 5], [1, 3, 3]], [1.0, 2.0, 3.0], (1000, 1000))
    sample = through(ring, tensor)
    assert sample.values.tolist() == [1, 5] and sample.shape == (1000, 1000) and sample.size == 2 and not sample.thinned


def test_forty_dimensions_arrive_flat_where_numpy_has_fewer(ring):
    sample = through(ring, torch.arange(2.0).reshape((1,) * 39 + (2,)))
    assert sample.shape == (1,) * 39 + (2,) and sample.values.ravel().tolist() == [0, 1]


def test_a_subclass_is_not_asked(ring):
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args, **kwargs):
            raise AssertionError("seen")

    assert through(ring, torch.ones(3).as_subclass(Loud)).values.tolist() == [1, 1, 1]


def test_later_writes_do_not_reach_what_was_sent(ring):
    tensor = torch.ones(4)
    ring.put(tensor, "layer", "activation", 0)
    tensor.zero_()
    assert ring.latest("layer", "activation").values.tolist() == [1, 1, 1, 1]


def test_a_sample_says_all_of_itself(ring):
    name = "blocks.0.</script>\n\udc80" + "é" * 400
    ring.put(torch.ones(1), name + "a", "grad", 2**40, scaled=True, note="n" * 500)
    ring.put(torch.ones(1), name + "b", "grad", 2**40)
    first, second = everything(ring.reader())
    assert first.name.startswith("blocks.0.</script>\n?é") and len(first.name.encode()) <= wire.LONGEST_NAME
    assert first.name != second.name and len(first.note) <= wire.LONGEST_NOTE
    assert (first.what, first.step, first.scaled, second.scaled, second.note) == ("grad", 2**40, True, False, "")


def test_samples_are_numbered_by_name_and_kind(ring):
    for name, what in [("a", "grad"), ("b", "grad"), ("a", "activation"), ("a", "grad")]:
        ring.put(torch.ones(1), name, what, 0)
    assert [(one.name, one.what, one.number) for one in everything(ring.reader())] == [
        ("a", "grad", 0), ("b", "grad", 0), ("a", "activation", 0), ("a", "grad", 1),
    ]  # fmt: skip


def test_time_goes_on_when_the_clock_is_set_back(ring, monkeypatch):
    first = through(ring, torch.ones(1)).time
    assert abs(first - time.time()) < 60
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert first < through(ring, torch.ones(1)).time < first + 60


def test_the_newest_of_a_name_is_found_among_others(ring):
    for step in range(6):
        ring.put(torch.full((2,), float(step)), "ab"[step % 2], "grad", step)
    assert ring.latest("a", "grad").step == 4 and ring.latest("b", "grad").step == 5
    assert ring.latest("a", "activation") is None
    for step in range(8):
        ring.put(torch.ones(1), "c", "grad", step)
    assert ring.latest("a", "grad") is None


# -- what is too large for a slot -----------------------------------------------------------------------------------------


def channels(*shape):
    """A tensor whose channels have the means 0, 1, 2, ..."""
    return torch.arange(float(shape[1])).reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape).contiguous()


UNEVEN = {
    "contiguous": channels(32, 64, 16, 16),
    "channels_last": channels(32, 64, 16, 16).contiguous(memory_format=torch.channels_last),
    "transposed": channels(4096, 64).T,
    "with gaps": channels(32, 64, 16, 32)[..., ::2],
    "a chunk": channels(2048, 192)[:, 64:128] - 64,
    "repeated": channels(4, 64, 16, 16)[:, :, None].expand(4, 64, 9, 16, 16),
    "not a power of two": channels(31, 63, 15, 17) + 0.5,
}


@pytest.mark.parametrize("tensor", UNEVEN.values(), ids=UNEVEN)
def test_thinning_passes_over_no_channel(ring, tensor):
    sample = through(ring, tensor)
    assert sample.thinned and sample.size == tensor.numel() and sample.shape == tuple(tensor.shape)
    assert 10_000 < sample.values.size <= ring.raw / 4
    assert sample.values.mean() == pytest.approx(31.5, abs=0.1) and sample.values.std() == pytest.approx(18.4, abs=0.4)
    assert np.unique(sample.values).size == np.unique(tensor.numpy()).size


@pytest.mark.parametrize("tensor", [tensor for name, tensor in UNEVEN.items() if name != "repeated"])
def test_what_is_left_after_thinning_is_values_of_the_tensor_at_even_distances(tensor):
    numbered = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.int64)
    numbered.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))
    step = step_through(tensor.shape, 65536)
    left = places(numbered, 65536)
    wanted = numbered.T.reshape(-1) if tensor.dim() == 2 and tensor.T.is_contiguous() else numbered.reshape(-1)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        wanted = numbered.permute(0, 2, 3, 1).reshape(-1)
    assert torch.equal(left, wanted[::step]) and all(math.gcd(step, size) == 1 for size in tensor.shape)


@pytest.mark.parametrize("name", ["contiguous", "channels_last", "transposed"])
def test_thinning_copies_nothing_that_fills_its_memory(name):
    tensor = UNEVEN[name]
    assert is_dense(tensor) and places(tensor, 1000).untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_one_nan_among_sixteen_million_values_is_found(ring):
    tensor = torch.zeros(4096, 4096)
    tensor[1234, 5] = -3.0
    assert through(ring, tensor)[10:14] == (-3.0, 0.0, 0, 0)
    tensor[4000, 77] = NAN
    tensor[4000, 78] = -INF
    sample = through(ring, tensor)
    assert sample[10:14] == (-3.0, 0.0, 1, 1) and np.isfinite(sample.values).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool, torch.uint8])
def test_extremes_of_large_tensors_are_exact(ring, dtype):
    tensor = torch.zeros(600_001, dtype=dtype)
    tensor[-2] = 1
    assert through(ring, tensor)[9:14] == (True, 0.0, 1.0, 0, 0)


def test_extremes_that_were_not_looked_for_are_unknown(ring):
    tensor = torch.full((600, 600), NAN)
    assert through(ring, tensor, exact=False)[10:14] == (None,) * 4
    assert through(ring, tensor)[10:14] == (None, None, 360_000, 0)  # no finite value
    assert through(ring, torch.zeros(600, 600, dtype=torch.complex64))[10:14] == (None, None, 0, 0)
    assert through(ring, torch.zeros(600_000, dtype=torch.float8_e5m2))[10:14] == (None,) * 4  # torch cannot order them


def test_of_tensors_beyond_64_mib_only_a_part_is_looked_at(ring):
    sample = through(ring, torch.zeros(65 * MIB, dtype=torch.uint8))
    assert sample.thinned and sample.size == 65 * MIB and sample[10:14] == (None,) * 4


def test_a_change_is_of_the_same_places_before_and_after(ring):
    weight = torch.randn(700, 700)
    before = ring.thin(weight)
    weight += torch.arange(490_000.0).reshape(700, 700)
    assert ring.put_pair(weight, before, "layer", "update", 0)
    sample = ring.latest("layer", "update")
    step = step_through((700, 700), 65536)
    assert sample.thinned and sample.size == 490_000 and sample.shape == (700, 700)
    assert sample.values == pytest.approx(np.arange(490_000.0)[::step], abs=0.1)


def test_a_change_of_few_values_keeps_its_shape_and_all_its_digits(ring):
    weight = torch.ones(2, 3, dtype=torch.bfloat16).T
    before = ring.thin(weight)
    weight.add_(2.0**-7)
    assert ring.put_pair(weight, before, "layer", "update", 0)
    sample = ring.latest("layer", "update")
    assert sample.values.tolist() == [[2.0**-7] * 2] * 3 and not sample.thinned


def test_a_change_of_another_size_is_refused(ring):
    assert not ring.put_pair(torch.ones(3), ring.thin(torch.ones(4)), "layer", "update", 0)
    assert ring.why_refused == "layer: its size has changed"


# -- what does not arrive --------------------------------------------------------------------------------------------------


def fake():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        return torch.ones(3)


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


REFUSED = {
    "it is laid out as sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "it has no values": lambda: torch.empty(3, device="meta"),
    "it is nested": nested,
    "it is no tensor but a float": lambda: 3.0,
    "it has 65 dimensions": lambda: torch.ones((1,) * 65),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_cannot_be_read_is_counted_and_said(ring, why):
    assert not ring.put(REFUSED[why](), "layer", "grad", 0)
    assert ring.refused == 1 and ring.sent == 0 and ring.why_refused.startswith(f"layer: {why}")


@pytest.mark.parametrize("make", [fake, lambda: torch.nn.LazyLinear(3).weight], ids=["fake", "lazy"])
def test_tensors_that_only_promise_values_are_refused(ring, make):
    assert not ring.put(make(), "layer", "grad", 0) and ring.why_refused == "layer: it has no values"


def test_inside_of_a_transform_nothing_is_sent(ring):
    torch.func.vmap(lambda x: (ring.put(x, "layer", "grad", 0), x)[1])(torch.ones(3))
    torch.func.grad(lambda x: (ring.put(x, "layer", "grad", 0), x)[1])(torch.tensor(2.0))
    assert ring.refused == 2 and ring.sent == 0


def test_nothing_enters_a_trace(ring):
    def function(x):
        ring.put(x, "layer", "grad", 0)
        return x + 1

    traced = torch.jit.trace(function, torch.ones(2))
    assert "copy_" not in str(traced.graph)
    assert ring.refused and ring.why_refused == "layer: it is being traced"


# -- what the training notices -----------------------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen.append(function)
        return function(*args, **(kwargs or {}))


class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen.append(function)
        return function(*args, **(kwargs or {}))


seen = []


@pytest.mark.parametrize("mode", [Functions, Calls])
def test_no_mode_sees_what_is_done(ring, mode):
    tensors = [torch.randn(3, requires_grad=True), torch.randn(600, 600), torch.randn(600, 1200)[:, ::2]]
    with mode():
        torch.ones(1)
        seen.clear()
        for tensor in tensors:
            ring.put(tensor, "layer", "grad", 0)
            before = ring.thin(tensor)
            ring.put_pair(tensor, before, "layer", "update", 0)
    assert ring.sent == 6 and not seen


def test_a_default_device_is_not_that_of_the_ring():
    with torch.device("meta"):
        ring = Ring(slots=2)
        assert ring.put(torch.ones(600, 1200, device="cpu")[:, ::2], "layer", "grad", 0), ring.why_refused
    assert ring.latest("layer", "grad").values.max() == 1
    ring.close()


def test_neither_graph_nor_generators_nor_the_tensor_are_touched(ring):
    leaf = torch.randn(600, 600, requires_grad=True)
    value = leaf * 2
    state, version, function = torch.get_rng_state(), value._version, value.grad_fn
    assert ring.put(value, "layer", "activation", 0)
    assert torch.equal(state, torch.get_rng_state()) and value._version == version and value.grad_fn is function
    value.sum().backward()
    assert torch.equal(leaf.grad, torch.full((600, 600), 2.0))


def test_inference_tensors_are_sent_inside_and_outside_of_inference_mode(ring):
    with torch.inference_mode():
        tensor = torch.ones(3)
        assert ring.put(tensor, "layer", "activation", 0)
    assert ring.put(tensor, "layer", "activation", 1) and ring.put(torch.ones(3), "layer", "activation", 2)


# -- readers ----------------------------------------------------------------------------------------------------------------


def test_a_reader_that_comes_late_counts_what_it_missed(ring):
    for step in range(100):
        ring.put(torch.ones(2), "layer", "grad", step)
    reader = ring.reader()
    assert [one.step for one in everything(reader)] == [*range(92, 100)]
    assert (reader.received, reader.dropped, reader.cursor) == (8, 92, 100)


def test_readers_do_not_wait_for_each_other(ring):
    quick, slow, slowest = (ring.reader() for _ in range(3))
    for step in range(30):
        ring.put(torch.ones(2), "layer", "grad", step)
        everything(quick)
        if step % 10 == 9:
            everything(slow)
    everything(slowest)
    assert [(one.received, one.dropped) for one in (quick, slow, slowest)] == [(30, 0), (24, 6), (8, 22)]


def test_counts_go_beyond_32_bits(ring):
    ring.sent = 2**32 - 3
    reader = ring.reader(2**32 - 3)
    for step in range(8):
        ring.put(torch.ones(2), "layer", "grad", step)
    assert [one.step for one in everything(reader)] == [*range(8)] and reader.cursor == 2**32 + 5
    late = ring.reader()
    assert len(everything(late)) == 8 and late.dropped == 2**32 - 3


def test_a_sample_that_is_overwritten_while_it_is_read_is_not_delivered():
    """The writer goes round between two steps of the reader, at each place where that can be."""
    ring = Ring(slots=2)
    reader = ring.reader()
    ring.put(torch.zeros(100), "layer", "grad", 0)
    copied = reader._copied

    def and_meanwhile(place, **options):
        found = copied(place, **options)
        for step in (1, 2):
            ring.put(torch.ones(100), "layer", "grad", step)
        reader._copied = copied
        return found

    reader._copied = and_meanwhile
    assert [one.step for one in everything(reader)] == [1, 2] and reader.dropped == 1
    ring.close()


def test_a_copy_that_failed_is_never_seen(ring):
    class Broken(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            if "copy_" in str(function):
                raise RuntimeError("no")
            return torch.ones(3).as_subclass(cls)

    reader = ring.reader()
    for step in range(9):
        ring.put(torch.ones(3), "layer", "grad", step)
    assert not ring.put(torch.ones(3).as_subclass(Broken), "layer", "grad", 9) and ring.refused == 1
    assert [one.step for one in everything(reader)] == [*range(2, 9)] and reader.dropped == 2  # its slot's old sample
    ring.put(torch.ones(3), "layer", "grad", 10)
    assert [one.step for one in everything(reader)] == [10]


WRITER = """
import os, sys, torch
from replaylens._watch.ring import Ring
ring = Ring(slots=3, raw=8 << 20)
tensor = torch.zeros(2 << 20)
print(ring.fd, flush=True)
for step in range(10 ** 9):
    tensor.fill_(step % 1000)
    ring.put(tensor, "layer", "grad", step % 1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the descriptor of another process is found in /proc")
def test_what_a_stopped_writer_left_half_written_is_not_delivered():
    writer = subprocess.Popen([sys.executable, "-W", "ignore", "-c", WRITER], stdout=subprocess.PIPE)
    try:
        descriptor = os.open(f"/proc/{writer.pid}/fd/{int(writer.stdout.readline())}", os.O_RDWR)
        memory = mmap(descriptor, 0)
        os.close(descriptor)
        reader = wire.Reader(memory)
        half_written = 0
        for _ in range(60):
            time.sleep(0.002)
            os.kill(writer.pid, signal.SIGSTOP)
            os.waitpid(writer.pid, os.WUNTRACED)
            words = memoryview(memory).cast("Q")
            half_written += any(
                words[(wire.SLOTS_BEGIN + slot * wire.stride_of(8 << 20)) // 8] % 2 for slot in range(3)
            )
            for sample in everything(reader):
                assert sample.values.size == 2 << 20 and (sample.values == sample.step).all()
            os.kill(writer.pid, signal.SIGCONT)
            sample = reader.take()  # against a writer that runs
            assert sample is None or (sample.values == sample.step).all()
        assert half_written > 10 and reader.received > 10 and reader.dropped > 0
        assert reader.received + reader.dropped == reader.cursor
    finally:
        writer.kill()
        writer.communicate()


def test_threads_write_at_once():
    ring = Ring(slots=1024, raw=4096)
    reader = ring.reader()

    def write(name):
        for step in range(200):
            ring.put(torch.full((1000,), float(step)), name, "grad", step)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    samples = everything(reader)
    assert ring.sent == len(samples) == 800 and reader.dropped == 0
    assert all((one.values == one.step).all() and one.number == one.step for one in samples)
    assert [one.step for one in samples if one.name == "a"] == [*range(200)]
    ring.close()


def test_a_signal_in_the_middle_of_a_sample_disturbs_no_slot(ring):
    """Its handler runs the model too."""

    def handler(*ignored):
        ring.put(torch.full((1000,), -1.0), "handler", "grad", 0)

    previous = signal.signal(signal.SIGALRM, handler)
    reader, wrong = ring.reader(), []
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for step in range(2000):
            ring.put(torch.full((1000,), float(step)), "layer", "grad", step)
            wrong += [one for one in everything(reader) if np.unique(one.values).tolist() not in ([-1], [one.step])]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not wrong and reader.received + reader.dropped == ring.sent > 2000


# -- the end -------------------------------------------------------------------------------------------------------------------


def descriptors():
    gc.collect()
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
def test_two_hundred_rings_leave_no_descriptor_and_no_mapping():
    def maps():
        return Path("/proc/self/maps").read_text().count("replaylens-watch")

    before, mapped = descriptors(), maps()
    for step in range(200):
        ring = Ring(slots=2)
        reader, page = ring.reader(), ring.status_page(1)
        ring.put(torch.ones(3), "layer", "grad", step)
        assert reader.take().step == step and page.received == 0
        ring.close()
        ring.close()
    del ring, reader, page
    assert descriptors() == before and maps() == mapped


def test_after_the_end_nothing_is_sent_and_nothing_raises(ring):
    sample = through(ring, torch.ones(3))
    ring.close()
    assert not ring.put(torch.ones(3), "layer", "grad", 0) and ring.sent == 1 and ring.fd == -1
    assert sample.values.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="this ring is closed"):
        ring.reader()


LARGE = torch.ones(60_000)


def test_a_ring_can_be_closed_while_threads_write():
    for _ in range(20):
        ring = Ring(slots=4)
        writer = threading.Thread(target=lambda ring: [ring.put(LARGE, "a", "b", 0) for _ in range(50)], args=(ring,))
        writer.start()
        while not ring.sent:
            time.sleep(0)
        ring.close()
        writer.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_writes_nothing(ring):
    ring.put(torch.ones(3), "layer", "grad", 0)
    with ring._lock:  # as if another thread were writing
        child = os.fork()
        if not child:
            was_sent = ring.put(torch.ones(3), "layer", "grad", 1)
            ring.close()
            os._exit(was_sent)
    assert os.waitpid(child, 0)[1] == 0
    ring.put(torch.ones(3), "layer", "grad", 2)
    assert [one.step for one in everything(ring.reader())] == [0, 2]


def test_without_a_memory_file_an_unnamed_file_serves(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ring = Ring(slots=2, raw=4096)
    assert ring.fd >= 0 and not list(tmp_path.iterdir())
    assert through(ring, torch.ones(3)).values.tolist() == [1, 1, 1]
    assert os.fstat(ring.fd).st_blocks * 512 >= wire.size_of(2, 4096)  # taken: a full disk cannot kill us later
    ring.close()


def test_where_no_file_can_be_made_the_ring_is_for_this_process(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    ring = Ring(slots=2)
    assert ring.fd == -1 and through(ring, torch.ones(3)).values.tolist() == [1, 1, 1]
    ring.close()


@pytest.mark.parametrize("sizes", [{"slots": 0}, {"raw": 8}])
def test_a_ring_without_room_is_refused(sizes):
    with pytest.raises(ValueError, match="one slot of 16 bytes at least"):
        Ring(**sizes)


def test_memory_that_is_no_ring_is_refused():
    with pytest.raises(ValueError, match="this memory holds no samples"):
        wire.Reader(mmap(-1, 1 << 20))


# -- pages of status -------------------------------------------------------------------------------------------------------------


def test_a_page_of_status_says_numbers_and_texts(ring):
    page, other, last = ring.status_page(0), ring.status_page(0), ring.status_page(wire.CHILDREN - 1)
    page.received, page.wants_pause = 2**40, 1
    page.say({"errors": {"film": "OSError: ü"}, "url": None})
    assert (other.received, other.wants_pause, last.received) == (2**40, 1, 0)
    assert other.said() == {"errors": {"film": "OSError: ü"}, "url": None} and last.said() == {}
    with pytest.raises(ValueError, match="15 readers at most"):
        ring.status_page(wire.CHILDREN)


def test_long_texts_are_cut_and_too_many_leave_what_was_said(ring):
    page = ring.status_page(0)
    page.say({"errors": {str(one): "é" * 5000 for one in range(8)}})
    said = page.said()["errors"]
    assert len(said) == 8 and all(text.startswith("éé") and text.endswith("…") for text in said.values())
    page.say({"errors": {str(one): "x" * 5000 for one in range(1000)}})
    assert page.said() == {"errors": said}


def test_sinks_of_one_kind_are_numbered():
    kinds = [
        {"kind": kind, "options": {"label": label}} for kind, label in [("csv", None), ("own", "m:f"), ("csv", None)]
    ]
    assert wire.names_of(kinds) == ["csv 1", "m:f", "csv 2"]
