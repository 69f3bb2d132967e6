"""What stands around the loop: the checks of a run before its first step."""
