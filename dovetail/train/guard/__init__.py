"""What watches over a run: its health, hangs, signals, and the other processes."""
