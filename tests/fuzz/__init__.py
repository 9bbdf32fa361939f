"""Random inputs: whatever comes, the library gives the right result or one QkeelError."""
