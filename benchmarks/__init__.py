"""Scripts that make what the documentation shows of records, and measurements that are no suite."""
