"""The commands of studies: run one, and merge parts of one."""
