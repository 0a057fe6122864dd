//! Resolves the names of Slurm's nodes by running `scontrol`.

use std::process::Command;

use crate::pingpong::address::resolve;
use crate::pingpong::failure::Failure;

/// Returns the first host of a node list such as `n[1-4]`. If the node's name cannot be resolved, returns its address from Slurm's
/// configuration.
///
/// # Errors
/// `scontrol` is missing, or does not know the node.
pub fn first_host(list: &str) -> Result<String, Failure> {
    let hosts = scontrol(&["show", "hostnames", list])?;
    let first = hosts.lines().next().map(str::trim).filter(|host| !host.is_empty());
    let first = first.ok_or_else(|| Failure::new(format!("the node list {list:?} is empty: give --root")))?;
    if resolve(first, 0).is_ok() {
        return Ok(first.to_owned());
    }
    let node = scontrol(&["--oneliner", "show", "node", first])?;
    Ok(address_of(&node).unwrap_or(first).to_owned())
}

fn address_of(node: &str) -> Option<&str> {
    node.split_whitespace().find_map(|word| word.strip_prefix("NodeAddr="))
}

fn scontrol(args: &[&str]) -> Result<String, Failure> {
    let failed = |what: String| Failure::new(format!("scontrol {}: {what}; give --root HOST instead", args.join(" ")));
    let output = Command::new("scontrol").args(args).output().map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(failed(String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_a_node_is_read() {
        let node = "NodeName=n1 Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName=here Version=22.05.8";
        assert_eq!(address_of(node), Some("127.0.0.1"));
        assert_eq!(address_of("NodeName=n1"), None);
    }
}
