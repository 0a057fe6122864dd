//! The flags for secured connections, and their conversion to the settings of a reactor. Certificates or a pre-shared key secure the
//! connections.

use clap::Args;
use rdma_reactor::Security;

use crate::pingpong::failure::Failure;

#[cfg(feature = "secure")]
pub mod keygen;

/// The security of connections. Both sides must use the same kind.
#[derive(Clone, Debug, Default, Args)]
#[group(skip)]
pub struct SecurityArgs {
    #[cfg(feature = "secure")]
    #[command(flatten)]
    files: files::SecurityFiles,
}

impl SecurityArgs {
    /// Returns the settings of the reactor. They are [`Security::Plain`] if no flag was given.
    ///
    /// # Errors
    /// A file cannot be read or used, or a flag is missing that another flag requires.
    pub fn security(&self) -> Result<Security, Failure> {
        #[cfg(feature = "secure")]
        return self.files.security();
        #[cfg(not(feature = "secure"))]
        Ok(Security::Plain)
    }

    /// Returns the flags as arguments, for another process that needs the same security.
    #[must_use]
    pub fn again(&self) -> Vec<std::ffi::OsString> {
        #[cfg(feature = "secure")]
        return self.files.again();
        #[cfg(not(feature = "secure"))]
        Vec::new()
    }
}

#[cfg(feature = "secure")]
mod files {
    use std::ffi::OsString;
    use std::fs;
    use std::path::{Path, PathBuf};

    use clap::Args;
    use rdma_reactor::{Psk, Security, SecurityError, Tls, TlsIdentity};

    use crate::pingpong::failure::Failure;

    /// The flags that name files with certificates and keys.
    // local: arguments of the program
    #[derive(Clone, Debug, Default, Args)]
    #[group(skip)]
    pub(super) struct SecurityFiles {
        /// Certificate of this side in PEM, followed by the intermediate ones; with --tls-key and --tls-ca
        #[arg(long, value_name = "FILE", global = true)]
        tls_cert: Option<PathBuf>,
        /// Private key of this side in PEM
        #[arg(long, value_name = "FILE", global = true)]
        tls_key: Option<PathBuf>,
        /// Certificates of the authorities that have signed those of the peers, in PEM
        #[arg(long, value_name = "FILE", global = true)]
        tls_ca: Option<PathBuf>,
        /// Name that a server's certificate must have [default: the server's address]
        #[arg(long, value_name = "NAME", global = true)]
        tls_name: Option<String>,
        /// Pre-shared keys, one NAME:64-HEX-DIGITS per line: the first is used to connect, all are accepted
        #[arg(long, value_name = "FILE", global = true)]
        psk_file: Option<PathBuf>,
    }

    fn read(path: &Path, flag: &str) -> Result<Vec<u8>, Failure> {
        fs::read(path).map_err(|error| Failure::new(format!("{flag} {}: {error}", path.display())))
    }

    impl SecurityFiles {
        pub(super) fn security(&self) -> Result<Security, Failure> {
            let Self { tls_cert, tls_key, tls_ca, tls_name, psk_file } = self;
            let failed = |error: SecurityError| Failure::new(error);
            let wrong = |flags: String| move |error: SecurityError| Failure::new(format!("{flags}: {error}"));
            let wrong_ca = |ca: &Path| wrong(format!("--tls-ca {}", ca.display()));
            let tls = match (tls_cert, tls_key, tls_ca) {
                (None, None, None) if tls_name.is_none() => None,
                (Some(certificate), Some(key), ca) => {
                    let flags = format!("--tls-cert {}, --tls-key {}", certificate.display(), key.display());
                    let (certificate, key) = (read(certificate, "--tls-cert")?, read(key, "--tls-key")?);
                    let identity = TlsIdentity::from_pem(&certificate, &key).map_err(wrong(flags))?;
                    match ca {
                        Some(ca) => Some(Tls::mutual(&identity, &read(ca, "--tls-ca")?).map_err(wrong_ca(ca))?),
                        None => Some(Tls::server(&identity).map_err(failed)?),
                    }
                }
                (None, None, Some(ca)) => Some(Tls::client(&read(ca, "--tls-ca")?).map_err(wrong_ca(ca))?),
                _ => {
                    let cure = "--tls-cert and --tls-key go together, and --tls-name needs --tls-ca";
                    return Err(Failure::new(cure));
                }
            };
            match (tls, psk_file) {
                (Some(_), Some(_)) => {
                    Err(Failure::new("--psk-file does not go with --tls-cert, --tls-key and --tls-ca"))
                }
                (None, None) => Ok(Security::Plain),
                (None, Some(file)) => {
                    let text = String::from_utf8(read(file, "--psk-file")?);
                    let text = text.map_err(|_| Failure::new(format!("--psk-file {}: not text", file.display())))?;
                    let psk = Psk::parse(&text);
                    Ok(Security::Psk(psk.map_err(wrong(format!("--psk-file {}", file.display())))?))
                }
                (Some(tls), None) => {
                    #[cfg(feature = "keylog")]
                    let tls = tls.log_keys();
                    Ok(Security::Tls(match tls_name {
                        Some(name) => tls.server_name(name).map_err(failed)?,
                        None => tls,
                    }))
                }
            }
        }

        pub(super) fn again(&self) -> Vec<OsString> {
            let Self { tls_cert, tls_key, tls_ca, tls_name, psk_file } = self;
            let files =
                [("--tls-cert", tls_cert), ("--tls-key", tls_key), ("--tls-ca", tls_ca), ("--psk-file", psk_file)];
            let files =
                files.into_iter().filter_map(|(flag, path)| Some([flag.into(), path.clone()?.into_os_string()]));
            let name = tls_name.iter().map(|name| ["--tls-name".into(), name.into()]);
            files.chain(name).flatten().collect()
        }
    }
}
