"""probe: what a linear readout of each layer knows of a target, cross-validated by scikit-learn.

In: features, and a label or number for each stimulus. Out: a LayerScores, a table with a row for each layer. All that
draws is seeded, so that the same features give the same table.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from .._ir.util import optional
from .._layers.format import Table, format_passes
from ..errors import BadFeatures
from .features import Features, steps_of
from .lazy_array import Array, LazyArray
from .numpy_later import np
from .similarity import matrix


@frozen(eq=False, repr=False)
class LayerScores(Mapping[str, Array]):
    """How well a target can be read from each layer: `found["layer4"]` has the score of each fold.

    `scoring` says what a score is, `chance` what it is without features: the most frequent class, or the mean.
    """

    scores: Mapping[str, Array]
    scoring: str
    chance: float

    def __getitem__(self, layer: str) -> Array:
        return self.scores[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def mean(self) -> dict[str, float]:
        """The score of each layer, the mean over the folds."""
        return {layer: float(scores.mean()) for layer, scores in self.items()}

    @property
    def std(self) -> dict[str, float]:
        """How much the score of each layer differs from fold to fold."""
        return {layer: float(scores.std()) for layer, scores in self.items()}

    @property
    def best(self) -> str:
        """The layer with the best score; the first, where several have it."""
        return max(self.mean, key=self.mean.__getitem__)

    def to_pandas(self) -> Any:
        """A row for each layer: the mean and the standard deviation over the folds."""
        return self._table(float).to_pandas()

    def _table(self, shown: Any) -> Table:
        std = self.std
        rows = [(layer, shown(mean), shown(std[layer])) for layer, mean in self.mean.items()]
        return Table(("layer", "score", "std"), tuple(rows))

    def __str__(self) -> str:
        lines = str(self._table("{:.3f}".format)).splitlines()
        return "\n".join([self._title, *[f"    {line}" for line in lines]])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<div>{html.escape(self._title)}</div>{self._table('{:.3f}'.format)._repr_html_()}"

    @property
    def _title(self) -> str:
        folds = max(map(len, self.scores.values()), default=0)
        layers = format_passes(len(self), "layer")
        return f"Linear probes of {layers}, {self.scoring} over {folds} folds (chance {self.chance:.3f}):"


def probe(
    features: Mapping[str, Any],
    target: Any,
    layers: Any = None,
    model: Any = None,
    cv: Any = 5,
    *,
    scoring: str | None = None,
    groups: Any = None,
    seed: int = 0,
) -> LayerScores:
    """How well a linear readout of each layer predicts a target: `probe(features, "category")`.

    `target` is the name of a label, or a class or number for each stimulus. Classes (texts, whole numbers) are read by
    logistic regression, and scored by accuracy; numbers by ridge regression, whose strength is chosen within each
    training set, and scored by R²; both after scaling each unit. `model` is any other estimator of scikit-learn, `cv` a
    number of folds (shuffled; stratified for classes) or one of its splitters, for which `groups` may be a label. A
    layer with a time axis is probed at each step.
    """
    selection = optional("sklearn.model_selection", "rsa")
    found = features if isinstance(features, Features) else Features.of(features, {}, {})
    wanted = _column(found, target, "target")
    is_class = _holds_classes(wanted)
    scoring = scoring or ("accuracy" if is_class else "r2")
    options = {
        "scoring": scoring,
        "groups": None if groups is None else _column(found, groups, "groups"),
        "cv": _splitter(selection, cv, is_class, seed),
    }
    estimator = model if model is not None else _readout(is_class)
    arrays = [one for name in found.names_of(layers) for one in steps_of(found[name])]
    scores = {one.name: _scores(selection, one, estimator, wanted, options) for one in arrays}
    dummy = optional("sklearn.dummy", "rsa")
    guess = dummy.DummyClassifier(strategy="prior") if is_class else dummy.DummyRegressor()
    chance = selection.cross_val_score(guess, np.zeros((len(wanted), 1)), wanted, **options)
    return LayerScores(scores, scoring, float(chance.mean()))


def _scores(selection: Any, array: LazyArray, estimator: Any, wanted: Array, options: Mapping[str, Any]) -> Array:
    values = matrix(array, repr(array.name))
    if len(values) != len(wanted):
        raise BadFeatures(f"the target has {len(wanted)} entries, and {array.name!r} has {len(values)} rows.")
    scores: Array = selection.cross_val_score(estimator, values, wanted, error_score="raise", **options)
    return scores


def _column(features: Features, given: Any, what: str) -> Array:
    """One entry for each stimulus: a label by its name, or what is given."""
    if isinstance(given, str):
        if given not in features.labels:
            known = ", ".join(map(repr, features.labels)) or "none"
            raise BadFeatures(f"there is no label {given!r} to take as {what}. There are: {known}.")
        return features.labels[given]
    found = np.asarray(given)
    if found.ndim != 1:
        raise BadFeatures(f"{what}= has shape {found.shape}. Give one entry for each stimulus, or the name of a label.")
    return found


def _holds_classes(wanted: Array) -> bool:
    """True for texts, truth values and whole numbers, as scikit-learn tells them apart."""
    kind: str = optional("sklearn.utils.multiclass", "rsa").type_of_target(wanted)
    if kind not in ("binary", "multiclass", "continuous"):
        raise BadFeatures(
            f"the target is {kind}: it holds neither classes nor numbers that a linear probe can predict."
        )
    return kind != "continuous"


def _readout(is_class: bool) -> Any:
    """A linear model behind a scaling of each unit."""
    linear = optional("sklearn.linear_model", "rsa")
    scale = optional("sklearn.preprocessing", "rsa").StandardScaler()
    last = linear.LogisticRegression(max_iter=5000) if is_class else linear.RidgeCV(alphas=np.logspace(-2, 6, 9))
    return optional("sklearn.pipeline", "rsa").make_pipeline(scale, last)


def _splitter(selection: Any, cv: Any, is_class: bool, seed: int) -> Any:
    if not isinstance(cv, int):
        return cv
    return (selection.StratifiedKFold if is_class else selection.KFold)(cv, shuffle=True, random_state=seed)
