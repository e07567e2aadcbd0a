"""How `commrt.launcher.launch` starts ranks, looks after them, and agrees with the launchers of other nodes."""
