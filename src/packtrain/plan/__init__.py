"""Before a run: its size, its speed on so many machines, its time and its cost; afterwards, how far that was off."""
