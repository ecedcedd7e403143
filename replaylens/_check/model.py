"""check of a model: all that can be asked when the model itself is at hand.

In: a captured model, and the report on its program. Out: the report with the laws that need the model.
"""

from __future__ import annotations

from .auditing import audit
from .elsewhere import other_inputs
from .gradients import gradients
from .report import CheckReport
from .subject import Subject
from .witness import witness


def with_model(subject: Subject, report: CheckReport) -> CheckReport:
    """The report with what plain forwards of the model say: calls, modules' outputs, other inputs, gradients."""
    return report.and_((audit(subject), witness(subject), other_inputs(subject), gradients(subject)))
