"""PyTorch Inspector's quick start, pasted, runs after one changed import; and what was broken there works."""

from __future__ import annotations

import re
from pathlib import Path

import av
import pytest
import torch
from torch import nn

from replaylens.compat import inspector
from replaylens.compat.inspector import DataRecorder, ModelExplorer, ParrallelHandler

QUICK_START = """
def main():

    model = models.alexnet()

    #----------------------------------
    # Step 1: Define how to process the passed data
    #----------------------------------
    # Callback functions are used to process data passed from the main process to child processes.
    # DataRecorder is an example
    dr = DataRecorder((640,480), 20., 100, 'output')

    #----------------------------------
    # Step 2: Define a ParrallelHandler
    #----------------------------------
    # A ParallelHandler manages all child processes.
    ph = ParrallelHandler(callback_onrun=dr.tensor_plot2D, callback_onclosing=dr.flush, frequency=20.0, timeout=30.0)

    #----------------------------------
    # Step 3: Attach layer/layers or full model
    #----------------------------------
    ph.track_model(-1, {'model': model})
    ph.track_layer(-1, {'classifier0_': model.classifier[0], 'classifier3_': model.classifier[3], 'classifier6_': model.classifier[6]})
    return model
"""  # the README's own lines, but for the import


class Models:
    """Stands for torchvision's `models`."""

    class AlexNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(4))
            layers = [nn.Linear(64, 16), nn.Dropout(), nn.ReLU(inplace=True), nn.Linear(16, 8), nn.ReLU(inplace=True)]
            self.classifier = nn.Sequential(*layers, nn.Identity(), nn.Linear(8, 10))

        def forward(self, x):
            return self.classifier(self.features(x).flatten(1))

    alexnet = AlexNet


@pytest.fixture(autouse=True)
def ends():
    yield
    if inspector.ParrallelHandler._first is not None:
        ParrallelHandler().stop()


def train(model, steps, shape=(2, 3, 16, 16)):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(shape)).square().mean().backward()
        optimizer.step()


def frames(path):
    with av.open(str(path)) as film:
        return sum(1 for _ in film.decode(video=0))


def test_the_quick_start_films_a_model_and_gradients_of_its_layers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"models": Models, "DataRecorder": DataRecorder, "ParrallelHandler": ParrallelHandler}
    exec(QUICK_START, scope)
    model = scope["main"]()
    handler = ParrallelHandler()  # as anywhere else in the program
    assert handler.is_alive()
    train(model, 41)
    handler.stop()
    assert not handler.is_alive()
    films = {path.name: frames(path) for path in Path("output").iterdir()}
    assert films == {
        "model-activation.mp4": 3,
        "classifier0_-grad.mp4": 3,
        "classifier3_-grad.mp4": 3,
        "classifier6_-grad.mp4": 3,
    }
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def collected(**settings):
    seen = []
    handler = ParrallelHandler(callback_onrun=lambda **message: seen.append(message), frequency=2, **settings)
    return handler, seen


def test_a_callback_gets_the_messages_of_the_original():
    handler, seen = collected()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    number, *_ = handler.track_model(-1, {"lin": model[0]})
    handler.set_internal_message("epoch:3")
    train(model, 3, (2, 4))
    handler.stop()
    assert [(m["unique_id"], m["key"], m["internal_message"], m["message"]) for m in seen] == [
        (number, "lin", "epoch:3", 0),
        (number, "lin", "epoch:3", 1),
    ]
    assert (seen[0]["input_data"] < 0).any()  # not what the ReLU behind it made of it in place


def test_the_gradient_of_a_tensor_is_sent_and_not_its_value():
    handler, seen = collected()
    weight = torch.full((3,), 7.0, requires_grad=True)
    handler.track_tensor(-1, {"w": weight})
    for _ in range(3):
        (weight * 3).sum().backward()
    handler.stop()
    assert [m["input_data"].tolist() for m in seen] == [[3.0] * 3] * 2
    assert not weight._backward_hooks


def test_a_pause_pauses():
    handler, seen = collected()
    model = nn.Linear(4, 4)
    handler.track_model(-1, {"lin": model})
    handler.set_pass_to_process(False)
    train(model, 4, (2, 4))
    handler.set_pass_to_process(True)
    train(model, 4, (2, 4))
    handler.stop()
    assert [m["message"] for m in seen] == [0, 1]


def test_several_processes_share_the_layers():
    handler, _ = collected()
    model = Models.alexnet()
    _, _, _, watches = handler.track_layer(-1, dict(model.classifier.named_children()), num_process=3)
    assert [len(watch.names) for watch in watches] == [3, 2, 2]


def test_there_is_one_handler_until_it_is_stopped():
    handler, _ = collected()
    assert ParrallelHandler() is handler
    with pytest.raises(ValueError, match="with other settings already"):
        ParrallelHandler(callback_onrun=print, frequency=5)
    handler.stop()
    with pytest.raises(TypeError, match="the first ParrallelHandler needs callback_onrun="):
        ParrallelHandler()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ParrallelHandler(callback_onrun=print, frequency=0), "frequency=0"),
        (lambda: DataRecorder(displayND_mode="3d"), "displayND_mode='3d'"),
        (lambda: DataRecorder().tensor_plot2D(key="x"), "is not called but given"),
        (lambda: collected()[0].track_tensor(-1, {"w": torch.ones(2)}), "does not require a gradient"),
        (lambda: collected()[0].track_model(-1, {"m": nn.ReLU()}, abs), "callback_transform="),
        (lambda: ModelExplorer.get_hook_layers(nn.ReLU(), torch.ones(2)), "takes a list of inputs"),
    ],
)
def test_bad_arguments_are_refused(make, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        make()


def test_the_explorer_lists_what_can_be_tracked_and_leaves_nothing(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    forward, backward = ModelExplorer.get_hook_layers(model, [torch.randn(2, 3, 8, 8)])
    assert list(forward) == list(backward) == list("01234") == list(ModelExplorer.get_layers(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    ModelExplorer.save_list_layers_name(list(forward), tmp_path / "layers.txt")
    names = ModelExplorer.load_list_layers_name(tmp_path / "layers.txt")
    assert ModelExplorer.get_hook_layers_fromlist(model, names) == forward
