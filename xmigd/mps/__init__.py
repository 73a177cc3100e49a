"""NVIDIA's MPS: servers of one device and one user whose kernels run at the same time."""
