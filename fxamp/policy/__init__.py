"""Cast policies: which operators autocast casts, to what, and why.

================  =========================================================================================
``cast_policy``   the words: what an operator can want, and a row of the table
``table``         the data: one row for each ATen overload that autocast intercepts
``dispatcher``    what the installed torch registers
``policy``        the value that passes ask: the table, filtered, for one device type
``reentrant``     data: kernels that consult autocast themselves, below autograd
``override``      what the user wants otherwise: a verb, and a ``selector`` that is asked about a ``site``
``scopes``        a policy on one model: which modules its selectors mean there
``passive``       which operators an override by place passes over, since they compute nothing
``plan``          one precision decision on file, with the graphs that it made
================  =========================================================================================
"""

from fxamp.policy.cast_policy import CastPolicy, OpRule
from fxamp.policy.policy import Policy
from fxamp.policy.table import REDISPATCHES

__all__ = ["REDISPATCHES", "CastPolicy", "OpRule", "Policy"]
