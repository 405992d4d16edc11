"""Scripts that turn records into figures and tables of the documentation, and measurements that are not suites."""
