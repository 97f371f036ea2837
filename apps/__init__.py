"""Apps on top of the library; each module here is imported only when its app is started."""
