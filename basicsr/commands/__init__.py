"""The sub-commands of ``basicsr``, one file each."""
