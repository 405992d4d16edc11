"""The hardware: data sheets, measured ceilings, and occupancy."""
