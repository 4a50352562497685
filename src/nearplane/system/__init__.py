"""What the computer gives: device, ranks, memory, locks, whole files, progress."""
