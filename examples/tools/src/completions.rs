//! Shell completions of a program's command line.

use std::ffi::OsString;

use clap::{Command, ValueEnum};
use clap_complete::Shell;

use crate::pingpong::failure::Failure;

/// If the command line is `--completions SHELL` and nothing else, returns the script that completes the program's command line in that
/// shell. Returns `None` for any other command line.
pub(crate) fn wanted(args: &[OsString], mut command: Command) -> Option<Result<String, Failure>> {
    let [_, flag, shell] = args else { return None };
    if flag != "--completions" {
        return None;
    }
    let Some(shell) = shell.to_str().and_then(|shell| Shell::from_str(shell, true).ok()) else {
        let known: Vec<_> = Shell::value_variants().iter().map(ToString::to_string).collect();
        let message = format!("--completions {}: give one of {}", shell.to_string_lossy(), known.join(", "));
        return Some(Err(Failure::new(message)));
    };
    let (name, mut script) = (command.get_name().to_owned(), Vec::new());
    clap_complete::generate(shell, &mut command, name, &mut script);
    Some(Ok(String::from_utf8_lossy(&script).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn ask(words: &[&str]) -> Option<Result<String, Failure>> {
        let args: Vec<_> = words.iter().map(OsString::from).collect();
        wanted(&args, crate::pingpong::cli::PingpongArgs::command())
    }

    #[test]
    fn every_shell_gets_a_script_that_knows_the_options() {
        for shell in Shell::value_variants() {
            let script =
                ask(&["rdma-pingpong", "--completions", &shell.to_string()]).expect("wanted").expect("a script");
            assert!(script.contains("rdma-pingpong") && script.contains("iters"), "{shell}: {script}");
        }
    }

    #[test]
    fn anything_else_is_left_to_the_program() {
        for words in [&["rdma-pingpong"][..], &["rdma-pingpong", "--help"], &["rdma-pingpong", "demo", "--all"]] {
            assert!(ask(words).is_none(), "{words:?}");
        }
        let refused = ask(&["rdma-pingpong", "--completions", "tcsh"]).expect("wanted").expect_err("no such shell");
        assert_eq!(refused.to_string(), "--completions tcsh: give one of bash, elvish, fish, powershell, zsh");
    }
}
