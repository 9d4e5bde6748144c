"""Housekeeping in stores and on machines: copies, new names, removal, garbage, and the space that things take."""
