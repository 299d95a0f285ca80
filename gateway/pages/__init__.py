"""What people read in a browser: the dashboard and the API's documentation."""
