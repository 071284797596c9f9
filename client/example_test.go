package client_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"

	dsecv1 "dsec/api/dsec/v1"
	"dsec/client"
)

func Example() {
	platform := newFake() // in its place: the URL and key that `dsec up` wrote to ~/.config/dsec/config.json
	defer platform.server.Close()
	ctx := context.Background()

	c, err := client.New(client.Options{URL: platform.server.URL, Key: "dsec_0123456789abcdef"})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	made, err := c.Create(ctx, &dsecv1.SandboxSpec{Image: "debian-python:12"})
	if err != nil {
		log.Fatal(err)
	}
	sandbox := c.Sandbox(made.GetId())
	defer sandbox.Delete(ctx)

	// A short command, with its output in the result.
	result, err := sandbox.Run(ctx, &dsecv1.Command{Shell: "echo hello"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d %s", result.GetExitCode(), result.GetStdout().GetData())

	// A long one, whose output is passed on as it comes, whatever becomes of the connection.
	command, err := sandbox.Start(ctx, &dsecv1.Command{Shell: "echo it goes on and on"})
	if err != nil {
		log.Fatal(err)
	}
	output := command.Output(ctx, client.Stdout, client.OutputOptions{Follow: true})
	defer output.Close()
	if _, err := io.Copy(os.Stdout, output); err != nil {
		log.Fatal(err)
	}
	// Output:
	// 0 hello
	// it goes on and on
}
