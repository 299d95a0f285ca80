"""One model over several processes: every layer's matrices are split, see docs/tensor-parallel.md.

Imports nothing here: the process that leads a group without ranks needs no torch.distributed.
"""
