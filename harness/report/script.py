"""Authority on reproduce.py: one file that needs torch and the kernel's package, and exits 1 while the fault lasts."""

import base64
import math
import re
from importlib import resources

import numpy as np
from torch import Tensor

from harness.bits import as_bytes
from harness.call import DIFFERENTIABLE
from harness.diagnose import Diagnosis
from harness.field import Field
from harness.problem import Case
from harness.report.call_text import given_keywords, target
from harness.report.other_form import FormOfCall, form_of_call, given_tensors
from harness.variants import VARIANTS

LITERAL = 64  # elements up to which a tensor is written as numbers
EMBEDDED_BYTES = 2**24  # of inputs and expected values; beyond it there is no script
WIDTH = 100  # characters of a line of base64
OUTPUTS = ("o", "ht", "h")


def script(made: Diagnosis, case: Case) -> str | None:
    """The text of reproduce.py; None where the inputs are too large to embed, the function is not importable, or the
    problem is a decode one, whose calls only the harness makes.

    What only the harness's sanitizer sees the script shows where that is installed; elsewhere it says so, and exits 2.
    """
    module, expression = target(made.route)
    tensors = given_tensors(case)
    size = sum(x.numel() * x.element_size() for x in tensors.values())
    if not module or made.route.entry == "decode":
        return None
    form = form_of_call(made, case) if made.finding.variant else None
    if size + (form.size if form else 0) > EMBEDDED_BYTES:
        return None
    template = resources.files("harness.report").joinpath("reproduce_template.py").read_text()
    head, _, rest = template.partition("# <embedded>\n")
    _, _, tail = rest.partition("# </embedded>\n")
    lines = _embedded(made, case, module, expression, tensors) + (_of_form(form, made) if form else [])
    embedded = "\n".join([*lines, ""])
    return head.replace("SUMMARY", _summary(made)) + embedded + tail


def _summary(made: Diagnosis) -> str:
    return "\n".join(f"{label:6} {text}" for label, text in made.lines).replace("\\", "/").replace('"""', "'''")


def _embedded(made: Diagnosis, case: Case, module: str, expression: str, tensors: dict[str, Tensor]) -> list[str]:
    finding, field = made.finding, made.field
    root = re.match(r"\w+", expression)[0]
    lines = [
        f"MODULE, ROOT, EXPRESSION = {module!r}, {root!r}, {expression!r}",
        f"ROUTE = {made.route.id if module == 'kda' else None!r}",
        f"ENTRY, QUANTITY, CLASS = {made.route.entry!r}, {finding.quantity!r}, {finding.klass!r}",
        f"OUTPUTS = {_outputs(made)!r}",
        f"GRADIENTS = {_gradients(made, case)!r}",
        f"KEYWORDS = {given_keywords(case, made.route)!r}",
        "TENSORS = {",
    ]
    lines += [f"    {name!r}: {_tensor(x)}," for name, x in tensors.items()] + ["}"]
    expected = None if finding.variant else _expected(field)
    shape, dtype = made.form or (None, None)
    lines.append(f"SHAPE, DTYPE = {shape!r}, {str(dtype).removeprefix('torch.') if dtype else None!r}")
    lines.append(f"EXPECTED = {_tensor(expected[0]) if expected else None}")
    lines.append(f"TOLERANCE = {_tensor(expected[1]) if expected else None}")
    lines.append(f"ALLOWED_RMS = {None if finding.variant else _allowed_rms(made)!r}")
    return lines


def _of_form(form: FormOfCall, made: Diagnosis) -> list[str]:
    """The other form of the call, over the empty one of the template."""
    lines = [f"FORM, PROMISE = {made.finding.variant!r}, {VARIANTS[made.finding.variant].promise!r}", "OTHER = {"]
    lines += [f"    {name!r}: {None if x is None else _tensor(x)}," for name, x in form.changed.items()] + ["}"]
    lines.append(f"OTHER_KEYWORDS = {form.keywords!r}")
    lines += [f"{name} = {None if x is None else _tensor(x)}" for name, x in form.places().items()]
    return [*lines, f"FACTOR, ALLOWED = {form.factor!r}, {form.allowed!r}"]


def _outputs(made: Diagnosis) -> tuple[str, ...]:
    return OUTPUTS[:1] if made.route.entry == "gate" else OUTPUTS


def _gradients(made: Diagnosis, case: Case) -> dict[str, str]:
    """Quantity -> argument, in the order of the call; empty without a backward pass."""
    if not (case.problem.gradients and made.route.differentiable):
        return {}
    return {quantity: name for name, quantity in DIFFERENTIABLE.items() if case.inputs.get(name) is not None}


def _expected(field: Field | None) -> tuple[Tensor, Tensor] | None:
    """What must come and how far off it may be, as fp64; nothing where that is not known or not worth its size."""
    if field is None or field.expected.numel() * 16 > EMBEDDED_BYTES:
        return None
    return field.expected, field.tolerance


def _allowed_rms(made: Diagnosis) -> float | None:
    """The root mean square error at which the criterion would be met, where no single element is over its tolerance.

    Those statistics grow in proportion to the error, so that is the error that was seen over the ratio that it had.
    """
    place, field = made.location, made.field
    if place is None or place.alone or not math.isfinite(made.finding.ratio):
        return None
    error = (field.got - field.expected).nan_to_num()
    return float(error.square().mean().sqrt()) / made.finding.ratio


def _tensor(x: Tensor) -> str:
    x, dtype = x.detach().cpu().contiguous(), str(x.dtype).removeprefix("torch.")
    if x.numel() <= LITERAL:
        text = repr(x.double().flatten().tolist() if x.is_floating_point() else x.flatten().tolist())
        return f"numbers({dtype!r}, {list(x.shape)}, {text})"
    text = base64.b64encode(np.asarray(as_bytes(x)).tobytes()).decode()
    lines = "".join(f"\n        {text[i : i + WIDTH]!r}" for i in range(0, len(text), WIDTH))
    return f"packed({dtype!r}, {list(x.shape)}, ({lines}\n    ))"
