package main

var (
	psCommand, inspectCommand, killCommand, rmCommand, logsCommand, cpCommand     command
	imageCommand, workspaceCommand, toolkitCommand, doctorCommand, versionCommand command
)
