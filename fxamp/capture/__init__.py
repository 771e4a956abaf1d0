"""From a model to a graph: the real ``forward`` runs on fake tensors and every operator is recorded.

======================  =================================================================================
``structure``           takes arguments and results apart into tensors and the structure around them
``dynamic_shapes``      reads which sizes the user wants symbolic
``symbols``             keeps sizes symbolic and makes the shape guard
``mirror``              copies the module tree, so that the user's is never touched
``sources``             says where each real tensor lives
``recorder``            writes one node an operator
``kernel_dtypes``       asks the kernels that consult autocast themselves
``refusals``            guards what the recorder cannot see
``capture``             joins them
======================  =================================================================================
"""
