"""How long a run will take and how much memory, told before it starts."""
