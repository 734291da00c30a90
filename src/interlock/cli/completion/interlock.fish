# Completion of interlock for fish: interlock completion fish >~/.config/fish/completions/interlock.fish
function __interlock
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l word (string unescape -- $current; or echo -- $current)
    set -l command $words[1]
    set -e words[1]
    set -l lines ($command __complete fish $words "$word" 2>/dev/null)
    set -l first $lines[1]
    set -e lines[1]
    switch "$first"
        case files
            __fish_complete_path "$word"
        case command
            while test "$words[1]" != --
                set -e words[1]
            end
            set -e words[1]
            complete -C (string join ' ' -- (string escape -- $words) "$current")
        case '*'
            printf '%s\n' $lines
    end
end
complete -c interlock -e
complete -c interlock -f -a '(__interlock)'
