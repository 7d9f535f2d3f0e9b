"""Who collects and who learns: a2c, a3c, ga3c."""
