"""Where the runs of a study are done: processes of this machine, or those of a Ray, Dask or Slurm cluster."""
