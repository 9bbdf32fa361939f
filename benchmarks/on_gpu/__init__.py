"""What a GPU is asked: `make gpu`, and the training runs of `python -m benchmarks.on_gpu.train`."""
