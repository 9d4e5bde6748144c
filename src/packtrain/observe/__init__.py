"""The one read model of a run: every view takes what it shows from here."""
