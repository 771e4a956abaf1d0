"""From a model to a graph: the real ``forward`` runs on fake tensors and every operator is recorded.

``mirror`` copies the module tree so that the user's is never touched, ``sources`` says where each real
tensor lives, ``structure`` takes arguments and results apart, ``symbols`` keeps sizes symbolic and
collects the shape guards, ``recorder`` writes the nodes, and ``capture`` joins them.
"""
