"""From a model to a graph: the real ``forward`` runs on fake tensors and every operator is recorded.

======================  =================================================================================
``structure``           takes arguments and results apart into tensors and the structure around them
``dynamic_shapes``      reads which sizes the user wants symbolic
``symbols``             keeps sizes symbolic
``guards``              makes the conditions on sizes and numbers read
``mirror``              copies the module tree, so that the user's is never touched
``sources``             says where each real tensor lives
``recorder``            writes one node an operator
``kernel_dtypes``       asks the kernels that consult autocast themselves
``policy_dispatch``     calls operators under a policy that is not torch's own
``table_regions``       lets regions of a device act on what stands in for it
``stand_in_layouts``    keeps ``contiguous`` where the device that is meant may need it
``dtype_reads``         notes where the model's Python asks for dtypes
``left_behind``         makes real what Python keeps of a recording
``refusals``            guards what the recorder cannot see
``capture``             joins them
======================  =================================================================================
"""
