"""Which calls, that nothing the model gives needs, can raise on other values? The model may catch what they raise.

In: the nodes of a graph, and what is needed of them. Out: guards that have such calls run again when a change reaches
them. Whatever else runs in a replay shows by itself that it raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .._core.node import Call, Guard, Node, meanings_of
from .._core.target import Target
from .._replay.flag_guards import writes_out

# Names without a leading `linalg_` and a closing underscore.
NAMES = frozenset(
    """cholesky cholesky_solve cholesky_inverse inverse inv solve solve_triangular lu lu_factor lu_solve ldl_factor
    ldl_solve svd svdvals eig eigh eigvals eigvalsh matrix_power tensorinv tensorsolve lstsq pinv pinverse matrix_rank
    cond logdet slogdet geqrf householder_product gather scatter scatter_add scatter_reduce index_select index_add
    index_copy index_fill index_put index_reduce index take take_along_dim put embedding embedding_bag nll_loss
    nll_loss2d nll_loss_nd cross_entropy_loss ctc_loss multi_margin_loss multilabel_margin_loss multinomial bernoulli
    poisson normal binomial exponential geometric log_normal cauchy uniform random histc histogram quantile nanquantile
    binary_cross_entropy max_unpool1d max_unpool2d max_unpool3d segment_reduce masked_scatter sparse_coo_tensor
    sparse_compressed_tensor sparse_csr_tensor __getitem__ __setitem__ _standard_gamma _sample_dirichlet
    embedding_renorm""".split()
)
BY_LAYOUT = frozenset("view view_as view_as_complex".split())  # as no view can be made of any memory
_OF_WHOLE_NUMBERS = frozenset(
    """floor_divide remainder fmod div divide true_divide pow __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__
    __rpow__ __ipow__ __ifloordiv__ __imod__ gcd lcm""".split()
)


def completions(nodes: list[Node], needed: Iterable[str], catches: bool) -> Iterator[Guard]:
    """A guard for each call that can raise and that nothing needed depends on. Where the model `catches` nothing, one
    that raises by memory layouts or flags alone is none of them.
    """
    names = NAMES | BY_LAYOUT if catches else NAMES
    if not any(isinstance(node, Call) and _can_raise(node, names) for node in nodes):
        return
    alive = set(needed)
    for node in reversed(nodes):
        if node.name in alive and isinstance(node, Call):
            alive.update(ref.node for ref in node.refs)
    for number, node in enumerate(nodes):
        if isinstance(node, Call) and node.name not in alive and not node.is_dynamic and _can_raise(node, names):
            yield Guard(
                node.target,
                tuple(meanings_of(node)),
                has_result=True,
                kind="completion",
                position=number + 1,
                scope=node.scope,
                source=node.source,
            )


def _can_raise(call: Call, names: frozenset[str]) -> bool:
    if call.target.short == "__getitem__" and len(call.refs) == 1:
        return False  # by whole numbers and slices
    if names is not NAMES and writes_out(call):
        return True
    inner = [leaf.short for leaf in call.args if type(leaf) is Target]
    for short in inner or (call.target.short,):
        name = short if short.startswith("__") else short.removeprefix("linalg_").rstrip("_")
        if name in names or (name in _OF_WHOLE_NUMBERS and not any(m.is_differentiable for m in call.meaning)):
            return True
    return False
