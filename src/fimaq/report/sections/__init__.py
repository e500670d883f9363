"""The sections of a report: each a function from Material to HTML."""
