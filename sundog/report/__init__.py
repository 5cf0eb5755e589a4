"""One HTML page of what was checked, traced, tuned and measured. Python only embeds the data."""
