"""Machines of AWS: what the client creates (fleet, launch, region), and what a machine does (boot.sh, instance)."""
