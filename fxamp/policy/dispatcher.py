"""What the installed dispatcher registers: the operators that autocast intercepts here.

The table is a superset over torch versions and builds.  The dispatcher knows which of its
operators exist in this one, so a policy is the table filtered by the answers of this file.
"""

from collections.abc import Mapping
from types import MappingProxyType

from torch._C import _dispatch_get_all_op_names, _dispatch_has_kernel_for_dispatch_key

from fxamp.errors import PolicyError

__all__ = ["AUTOCAST_KEYS", "autocast_key", "registered", "registered_operators"]

AUTOCAST_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "cuda": "AutocastCUDA",
        "cpu": "AutocastCPU",
        "xpu": "AutocastXPU",
        "mps": "AutocastMPS",
        "mtia": "AutocastMTIA",
    }
)
"""The dispatch key under which each device type's autocast kernels are registered."""


def autocast_key(device_type: str) -> str:
    """The dispatch key of the device type's autocast kernels.

    Raises:
        PolicyError: The device type is not one of ``AUTOCAST_KEYS``.

    Example:
        >>> autocast_key("cuda")
        'AutocastCUDA'
    """
    if device_type not in AUTOCAST_KEYS:
        raise PolicyError(
            f"no autocast policy is known for device type {device_type!r}\n"
            f"  use one of:  {', '.join(map(repr, AUTOCAST_KEYS))}"
        )
    return AUTOCAST_KEYS[device_type]


def registered(op_name: str, device_type: str) -> bool:
    """Whether the operator has an autocast kernel on the device type, in the installed torch.

    Args:
        op_name: The overload's name, ``aten::mm``; one that this torch lacks is not registered.
        device_type: One of ``AUTOCAST_KEYS``.

    Raises:
        PolicyError: The device type is not one of ``AUTOCAST_KEYS``.

    Example:
        >>> registered("aten::mm", "cpu"), registered("aten::relu", "cpu")
        (True, False)
    """
    return _has_kernel(op_name, autocast_key(device_type))


def registered_operators(device_type: str) -> frozenset[str]:
    """The names of all ATen overloads with an autocast kernel on the device type.

    Raises:
        PolicyError: The device type is not one of ``AUTOCAST_KEYS``.

    Example:
        >>> "aten::conv2d.padding" in registered_operators("cpu")
        True
    """
    key = autocast_key(device_type)
    names = (name for name in _dispatch_get_all_op_names() if name.startswith("aten::"))
    return frozenset(name for name in names if _has_kernel(name, key))


def _has_kernel(op_name: str, key: str) -> bool:
    try:
        return _dispatch_has_kernel_for_dispatch_key(op_name, key)
    except RuntimeError:  # "operator aten::x does not exist": added or removed in another version
        return False
