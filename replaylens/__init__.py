"""One call turns a forward pass of any PyTorch model into an immutable program of pure operations.

prog = replaylens.capture(model, x)                  # the model is left as it was
prog["relu_3"].value                                 # any activation
prog.replay(from_="relu_3", patch=torch.zeros_like)  # only what the change can reach is run again
print(prog.code)                                     # the program, as Python
"""

from . import _loading as _loading
from ._check.report import CheckReport as CheckReport
from ._edit.edges import Edge as Edge
from ._edit.edit import Edit as Edit
from ._edit.part import Part as Part
from ._edit.patch import (
    Add as Add,
    Apply as Apply,
    Clamp as Clamp,
    From as From,
    Mean as Mean,
    Noise as Noise,
    Patch as Patch,
    Project as Project,
    Resample as Resample,
    Rotate as Rotate,
    Scale as Scale,
    Set as Set,
    Zero as Zero,
)
from ._edit.select import Selection as Selection, where as where
from ._extract.extract import extract as extract
from ._extract.features import Features as Features
from ._extract.lazy_array import LazyArray as LazyArray
from ._extract.linear_probe import LayerScores as LayerScores, probe as probe
from ._extract.projection import SRP as SRP
from ._extract.similarity import cka as cka, rdm as rdm
from ._replay.gradients import Grads as Grads
from ._scale.distribute import Execution as Execution
from ._scale.on_ray import on_ray as on_ray
from ._study.attributed_pairs import Attributions as Attributions, attribution as attribution
from ._study.attribution import Attribution as Attribution
from ._study.many_checks import CheckReports as CheckReports, check_many as check_many
from ._study.paths import path_patch as path_patch
from ._study.sweep import Sweep as Sweep, sweep as sweep
from ._sweep.batch_runner import Replays as Replays
from ._sweep.sweep_plan import Plan as Plan
from ._version import __version__ as __version__
from ._view.overlays import Diff as Diff
from ._view.theme import DARK as DARK, PAPER as PAPER, Theme as Theme
from ._watch.judges import Above as Above, Dead as Dead, NotFinite as NotFinite
from ._watch.probes import Probes as Probes, probes as probes
from ._watch.sink_specs import Film as Film
from ._watch.step_file import Step as Step, step as step
from ._watch.watch import Watch as Watch, watch as watch
from .errors import (
    BadEdit as BadEdit,
    BadExecutor as BadExecutor,
    BadFeatures as BadFeatures,
    BadFile as BadFile,
    BadMetric as BadMetric,
    BadPart as BadPart,
    BadPatch as BadPatch,
    BadSource as BadSource,
    CannotDraw as CannotDraw,
    CannotSave as CannotSave,
    CaptureError as CaptureError,
    DivergedReplay as DivergedReplay,
    InputMismatch as InputMismatch,
    LostWorkers as LostWorkers,
    NoGradient as NoGradient,
    NoSuchLayer as NoSuchLayer,
    NotDifferentiable as NotDifferentiable,
    NotSaved as NotSaved,
    NoValues as NoValues,
    PlanDiffers as PlanDiffers,
    ReplaylensError as ReplaylensError,
    ShapeMismatch as ShapeMismatch,
    StaleValue as StaleValue,
    UnannouncedWrite as UnannouncedWrite,
    UnboundReference as UnboundReference,
    UnknownOrigin as UnknownOrigin,
    UnlawfulGraph as UnlawfulGraph,
    UnresolvedTarget as UnresolvedTarget,
    UnsupportedModel as UnsupportedModel,
    Untrusted as Untrusted,
    WrongCount as WrongCount,
)
from .files import (
    FileInfo as FileInfo,
    from_json as from_json,
    inspect as inspect,
    load as load,
    save as save,
    to_json as to_json,
)
from .program import Program as Program, capture as capture, check as check, run as run
