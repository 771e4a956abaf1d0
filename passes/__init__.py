"""The compiler, one file a pass, in the order in which they run; imported as ``fxamp.passes``.

====  ======================  ===========================================================================
 1    ``flatten-regions``     rewrite: the state of autocast moves from marks onto the nodes
 2    ``expand-composites``   rewrite: composites that hide operators with a rule are opened
 3    ``propagate-dtypes``    analysis: a node that capture left without a dtype gets it (it leaves none)
 4    ``classify``            analysis: the policy's rule for every operator
 5    ``resolve-promotes``    analysis: the common dtype where inputs must agree
 6    ``insert-casts``        rewrite: the casts are written, in eager's places
 7    ``keep-reentrant``      rewrite: kernels that consult autocast themselves run in a real region
 8    ``fold-noop-casts``     clean-up: casts that change nothing go
 9    ``fold-noop-movement``  clean-up: slices and expansions that take all of a value go
10    ``place-casts``         clean-up: casts move through movement to where they cost least
11    ``join-slice-casts``    clean-up: casts of slices that lie apart become one
12    ``fold-cast-chains``    clean-up: casts of casts that lost nothing become one, or none
13    ``remove-sandwiches``   clean-up: casts around an operator that rounds as they do go
14    ``share-casts``         clean-up: a value has one cast to a dtype
15    ``remove-dead-code``    clean-up: nodes that nobody reads go
16    ``verify``              check: every dtype is the one recorded under eager autocast
====  ======================  ===========================================================================

The programs of a frozen module go through two more.  ``fold-weight-casts``: they read rounded weights.
``fold-weight-arithmetic``: what depends on weights and constants alone is computed once, and read.

A wrong cast is a wrong row in ``fxamp/policy`` (which rule), or a fault in 2 (an operator stayed hidden) or
4-6 (what the rule does).  The one cast that all uses of a weight share is written in 6.  What a pass is:
``base.py``; the list itself: ``pipeline.py``.  Passes speak through ``node.meta``: capture writes ``fact``
(dtype, shape, device, gradient), 1 ``region`` and ``grad``, 4-5 ``decision``, 6 ``inserted`` and ``kept``.
What a clean-up may do is its level (``clean_up.py``): training-exact where gradients are recorded, else
inference-exact; 10-14 leave a trace of each cast that they move or drop (``fxamp/ir/edits.py``).  12 runs
before 10, too, which would part some chains.
Capture comes before (``fxamp/capture``), flat code and running after (``fxamp/runtime``).
"""

if __name__ == "passes":
    raise ImportError("this folder is the package fxamp.passes: write `import fxamp.passes`")

from fxamp.passes.pipeline import build_pipeline, run_passes

__all__ = ["build_pipeline", "run_passes"]
