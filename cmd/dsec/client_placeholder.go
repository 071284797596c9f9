package main

var (
	runCommand, execCommand, psCommand, inspectCommand, killCommand, rmCommand, logsCommand, cpCommand command
	imageCommand, workspaceCommand, toolkitCommand, doctorCommand, versionCommand                       command
)
