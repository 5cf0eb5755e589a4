"""Other people's test suites: an importer per suite, which takes the path of a checkout."""
