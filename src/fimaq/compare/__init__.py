"""Many runs beside each other: a suite is read, its cells are run, tables are written."""
