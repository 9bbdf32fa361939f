"""The executors: places where the runs of a study are done, on this machine or a Ray, Dask or Slurm cluster."""
