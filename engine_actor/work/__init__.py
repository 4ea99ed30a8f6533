"""Work objects: what one step launches, with prepare, launch and finish."""
