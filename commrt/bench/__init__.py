"""`commrt bench`: times the collectives and checks them in the same run, with nccl-tests' flags, columns and keys."""
