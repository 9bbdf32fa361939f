"""What a GPU is asked: `make gpu`, and the training runs of `make gpu-train`."""
