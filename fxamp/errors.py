"""The exceptions of fxamp, one for each kind of failure.

Every one is an ``FxampError`` and also the built-in exception that fits, so code that catches
what ``torch.autocast`` raises (``RuntimeError``) keeps working.

====================  ==================  ======================================
``ArgumentError``     ``ValueError``      an argument of a function of fxamp does not fit
``CaptureError``      ``RuntimeError``    the model cannot be captured as asked
``PolicyError``       ``RuntimeError``    a policy forbids the call, or is not one
``InvariantError``    ``AssertionError``  fxamp broke its own rules: report it
``FrozenError``       ``RuntimeError``    a frozen model is asked for what it gave up
``ExportError``       ``RuntimeError``    an artifact cannot be written, or does not hold what it should
====================  ==================  ======================================

``RecaptureWarning`` is no exception but a warning: a model is called in so many ways that it is no longer
captured for new ones.  So are ``PlanWarning``, a graph is not the one that a plan file has, and
``ExportWarning``, an artifact is not all that the model is.
"""

__all__ = [
    "ArgumentError",
    "CaptureError",
    "ExportError",
    "ExportWarning",
    "FrozenError",
    "FxampError",
    "InvariantError",
    "PlanWarning",
    "PolicyError",
    "RecaptureWarning",
]


class FxampError(Exception):
    """Base of everything that fxamp raises on its own account; never raised itself."""


class ArgumentError(FxampError, ValueError):
    """Raised when an argument of a function of fxamp does not fit the others (``dynamic_shapes``)."""


class CaptureError(FxampError, RuntimeError):
    """Raised when a model cannot be turned into a graph in the way that the caller asked for.

    Users seldom meet it: a converted model runs such a call eagerly and gives the message as the
    reason in its report.
    """


class PolicyError(FxampError, RuntimeError):
    """Raised where the cast policy gives no valid program, or where a policy cannot be made.

    Three cases, of which eager autocast raises the first two at the same call as a
    ``RuntimeError``:

    - an operator that the policy bans is called (``binary_cross_entropy`` on CUDA);
    - a promoting operator gets floating dtypes that have no join under the policy;
    - a policy is asked for a device type or a dtype that autocast does not support.
    """


class FrozenError(FxampError, RuntimeError):
    """Raised where a frozen module, or a model that freezing has consumed, cannot do what is asked of it.

    - It is trained: ``train()``, or an input that requires grad while gradients are recorded.
    - A call needs a float32 weight of which only the low precision copy is kept.
    - Its dtypes are to be changed, or what is loaded does not have the precision that is stored.
    - The model was frozen with ``consume=True`` and is called.
    """


class ExportError(FxampError, RuntimeError):
    """Raised where an artifact cannot be written, or does not hold what it should.

    - The model is no single graph: a part of it runs eagerly, or values of tensors decide what runs.
    - The exporter of the format refuses the graph, or a package that it needs is not installed.
    - The file cannot be written there.
    - What was written gives other values than the converted model.

    Whatever was under the final name before is still there.
    """


class InvariantError(FxampError, AssertionError):
    """Raised when a graph breaks a rule that holds between passes: a bug in fxamp.

    Nothing in the user's model is at fault and nothing in it needs to change.  The message has
    the node, the source line and both dtypes, which is what a bug report needs.
    """


class ExportWarning(UserWarning):
    """Given where an artifact is valid, but not all that the model is, or may disappoint.

    - A constant or a weight does not fit the low precision dtype.
    - The model keeps a tensor in an attribute, which the artifact does not.
    - What the artifact needs where it is loaded (a package with an operator or a class of the result).
    """


class PlanWarning(UserWarning):
    """Given where a model that is converted by a plan file gets another graph than the plan has.

    The message has every operator and dtype that differs.  Another version of torch, of a library or of the
    model may be the reason; the policy and its overrides are the plan's all the same.
    """


class RecaptureWarning(UserWarning):
    """Given where a model has been captured so often that it runs eagerly for further kinds of calls.

    What was captured is still used, and all results stay right.  The message has what changed from call to
    call and the way out; ``amp.report().recaptures`` has all of them.
    """
