package main

import (
	"context"
	"flag"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"dsec/client"
	"dsec/internal/config"
	"dsec/internal/image"
)

// Completion in shells: each shell's script asks `dsec completion words` with the words that stand before the cursor, so that what is
// offered is what this program takes.

func completionCommand() command {
	return command{
		name: "completion", group: groupDiagnosis, args: "bash|zsh|fish",
		summary: "print a script that completes commands, flags, sandboxes and environments in a shell",
		details: "Ids and names of sandboxes, environments and contexts are asked of the platform as they are needed.\n\n" +
			"  source <(dsec completion bash)       in ~/.bashrc; zsh likewise, behind compinit\n\n" +
			"  dsec completion fish > ~/.config/fish/completions/dsec.fish",
		setup: setupCompletion,
	}
}

func setupCompletion(f *flagSet) action {
	var asJSON bool
	jsonFlag(f, &asJSON, "print the script as a JSON string")
	return func(ctx context.Context, c *console, args []string) error {
		if len(args) > 0 && args[0] == "words" { // a script asks
			return offer(ctx, c, args[1:])
		}
		if err := wantArgs(args, 1, 1, "the shell"); err != nil {
			return err
		}
		script, ok := completionScripts[args[0]]
		switch {
		case !ok:
			return usagef("%q: it is one of %s", args[0], strings.Join(slices.Sorted(maps.Keys(completionScripts)), ", "))
		case asJSON:
			return c.printJSON(script)
		}
		return c.print("%s", script)
	}
}

// In bash a word ends at the characters of COMP_WORDBREAKS, : and = among them: words are cut at blanks here, and of what is offered
// the part before the last such character is there already.
var completionScripts = map[string]string{
	"bash": `_dsec() {
    local line=${COMP_LINE:0:COMP_POINT} cur there
    local -a words
    read -ra words <<<"$line"
    [[ $line == *[[:blank:]] ]] && words+=("")
    cur=${words[-1]}
    mapfile -t COMPREPLY < <("${words[0]}" completion -- words "${words[@]:1}" 2>/dev/null)
    there=${cur%"${cur##*[:=]}"}
    if [[ -n $there ]]; then COMPREPLY=("${COMPREPLY[@]#"$there"}"); fi
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[:=] ]]; then compopt -o nospace; fi
}
complete -o default -F _dsec dsec
`,
	"zsh": `#compdef dsec
_dsec() {
    local -a found
    found=("${(@f)$("${words[1]}" completion -- words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n ${found[1]} ]]; then compadd -Q -- "${found[@]}"; else _files; fi
}
compdef _dsec dsec
`,
	"fish": `function __dsec_complete
    set -l before (commandline -opc)
    set -l found ($before[1] completion -- words $before[2..] (commandline -ct) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c dsec -f -a '(__dsec_complete)'
`,
}

// completeWithin is how long the platform may take: somebody waits at a prompt.
const completeWithin = 2 * time.Second

// offer prints what may stand where the last word is, for the scripts. It never fails: where nothing is known, nothing is offered.
func offer(ctx context.Context, c *console, words []string) error {
	if len(words) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, completeWithin)
	defer cancel()
	last := words[len(words)-1]
	for _, w := range complete(ctx, c, words[:len(words)-1], last) {
		if !strings.HasPrefix(w, last) || !harmless.MatchString(w) {
			continue
		}
		if err := c.print("%s\n", w); err != nil {
			return err
		}
	}
	return nil
}

// harmless is what may be put at a prompt as it is. Names of sandboxes are anybody's who has a key of the project.
var harmless = regexp.MustCompile(`^[A-Za-z0-9._:@/=+,-]+$`)

// complete gives what may stand behind words; last is what there is of it.
func complete(ctx context.Context, c *console, words []string, last string) []string {
	cmd, path, rest := find(commandTable(), words)
	if cmd == nil || cmd.setup == nil {
		table := commandTable()
		if cmd != nil {
			table = cmd.sub
		}
		if len(rest) > 0 {
			return nil
		}
		return namesOf(table)
	}
	f := newFlagSet(path)
	cmd.setup(f)
	l := f.readLine(rest)
	p := prompt{ctx: ctx, c: c, path: path, context: l.context}
	name, _, attached := strings.Cut(last, "=")
	switch {
	case l.open != "":
		return p.values(l.open)
	case l.raw || f.commandAfter >= 0 && l.positional > f.commandAfter:
		return nil // the command's own words
	case strings.HasPrefix(name, "--") && attached:
		return prefixed(name+"=", p.values(name[2:]))
	case strings.HasPrefix(last, "-"):
		return f.names()
	}
	return p.positional(cmd.args, l.positional)
}

func namesOf(table []command) []string {
	var all []string
	for _, k := range table {
		if k.group != "" {
			all = append(all, k.name)
		}
	}
	return all
}

func prefixed(prefix string, list []string) []string {
	for i, s := range list {
		list[i] = prefix + s
	}
	return list
}

// names are the long forms of all flags.
func (f *flagSet) names() []string {
	all := []string{"--help"}
	f.VisitAll(func(g *flag.Flag) { all = append(all, "--"+g.Name) })
	return all
}

// A typedLine is what the words of an unfinished command line say.
type typedLine struct {
	positional int
	open       string // the flag whose value comes next
	context    string
	raw        bool // behind "--"
}

// readLine reads as parse does, and takes what is wrong.
func (f *flagSet) readLine(words []string) (l typedLine) {
	for _, w := range words {
		switch {
		case l.open != "":
			if l.open == "context" {
				l.context = w
			}
			l.open = ""
		case l.raw || len(w) < 2 || w[0] != '-' || f.commandAfter >= 0 && l.positional > f.commandAfter:
			l.positional++
		case w == "--":
			l.raw = true
		case strings.HasPrefix(w, "--"):
			name, value, attached := strings.Cut(w[2:], "=")
			if g := f.Lookup(name); g != nil && !attached && !isBoolFlag(g) {
				l.open = name
			} else if name == "context" {
				l.context = value
			}
		default:
			l.open = f.openLetter(w[1:])
		}
	}
	return l
}

// openLetter is the flag among letters that takes the next word; "" if none does.
func (f *flagSet) openLetter(letters string) string {
	for i := range letters {
		g := f.Lookup(f.letters[letters[i:i+1]])
		if g == nil {
			return ""
		}
		if !isBoolFlag(g) {
			if i == len(letters)-1 {
				return g.Name
			}
			return "" // its value is attached
		}
	}
	return ""
}

// A prompt asks the platform for what it has.
type prompt struct {
	ctx           context.Context
	c             *console
	path, context string
}

// values are those of a flag.
func (p prompt) values(flag string) []string {
	switch flag {
	case "context":
		return p.contexts()
	case "workspace", "toolkit":
		return p.environments(flag)
	}
	return nil
}

// positional are the values of the n-th argument, by its word on the usage line.
func (p prompt) positional(usage string, n int) []string {
	words := strings.Fields(usage)
	if len(words) == 0 {
		return nil
	}
	word := words[min(n, len(words)-1)]
	if n >= len(words) && !strings.HasSuffix(strings.TrimRight(word, "]"), "...") {
		return nil
	}
	switch word = strings.Trim(word, "[].|"); {
	case strings.HasPrefix(usage, "SANDBOX:PATH") && n < 2:
		return suffixed(p.sandboxes(), ":")
	case strings.HasPrefix(word, "SANDBOX"):
		return p.sandboxes()
	case word == "IMAGE":
		return p.environments("image")
	case strings.HasPrefix(word, "NAME[:TAG"):
		return p.environments(strings.Fields(p.path)[1])
	case word == "bash|zsh|fish":
		return strings.Split(word, "|")
	}
	return nil
}

func suffixed(list []string, suffix string) []string {
	for i := range list {
		list[i] += suffix
	}
	return list
}

func (p prompt) contexts() []string {
	path, err := config.Path(p.c.getenv)
	if err != nil {
		return nil
	}
	file, err := config.Load(path)
	if err != nil {
		return nil
	}
	return slices.Sorted(maps.Keys(file.Contexts))
}

func (p prompt) sandboxes() []string {
	cl, err := p.c.dial(p.context)
	if err != nil {
		return nil
	}
	var all []string
	for s, err := range cl.List(p.ctx, nil) {
		if err != nil {
			return nil // rather nothing than a part
		}
		all = append(all, s.GetId())
		if name := s.GetSpec().GetName(); name != "" {
			all = append(all, name)
		}
	}
	return slices.Compact(slices.Sorted(slices.Values(all)))
}

var environmentKinds = map[string]string{"image": image.KindBase, "workspace": image.KindWorkspace, "toolkit": image.KindToolkit}

// environments are those of a kind, as a person calls it.
func (p prompt) environments(word string) []string {
	cl, err := p.c.dial(p.context)
	if err != nil {
		return nil
	}
	all, err := client.Collect(cl.ListEnvironments(p.ctx, environmentKinds[word]))
	if err != nil {
		return nil
	}
	var names []string
	for _, e := range all {
		if e.GetName() != "" {
			names = append(names, shortRef(e.GetName()))
		}
	}
	return names
}
