"""Algorithms: `<collective>/<name>.py` exports `PLUGIN_API` and `plugin` (see `commrt.algorithm`)."""
