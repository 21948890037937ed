"""Networks of public libraries, and how they grow; `python -m tests.foreign` writes the table anew."""
