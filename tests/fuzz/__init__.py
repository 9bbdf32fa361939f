"""Random inputs of every class: whatever comes, the library gives the right numbers or one QkeelError, and in time."""
