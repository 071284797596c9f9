package main

// version is set by the build: -ldflags "-X main.version=…".
var version = "0.1.0-dev"
