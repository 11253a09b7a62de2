_meshllm_completion() {
    local IFS=$'\n'
    COMPREPLY=($(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \
                 _MESHLLM_COMPLETE=complete_bash $1))
}

complete -o default -F _meshllm_completion meshllm
